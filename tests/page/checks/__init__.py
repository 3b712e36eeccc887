"""What the page must do, in a real browser in front of real servers."""
