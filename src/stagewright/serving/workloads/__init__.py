"""Where requests come from: traces that were recorded, and arrivals and lengths that are drawn."""
