"""A described model on a cluster: its layers, the devices, a spread over them, and what that costs."""
