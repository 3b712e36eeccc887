"""Which models there are, here and on the hub, and by what names."""
