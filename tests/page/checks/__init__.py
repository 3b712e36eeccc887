"""Checks of the page, in a real browser in front of real servers."""
