"""Messages between a server and release services, and the frames that carry them."""
