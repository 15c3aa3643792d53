"""The cheapest way to serve a load: layouts and numbers of instances, each of them played."""
