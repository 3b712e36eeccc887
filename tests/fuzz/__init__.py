"""Bodies whose sizes double, and a watch on the server that reads them."""
