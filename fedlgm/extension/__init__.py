"""Users' own objects: how they are named, loaded, registered, tried, isolated and tested."""
