"""Sources of requests: recorded traces, and sampled arrivals and lengths."""
