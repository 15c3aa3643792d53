"""What ranks hold where communication beside kernels ends late: memory over time, in columns."""
