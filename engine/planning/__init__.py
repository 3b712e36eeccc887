"""Capacity on paper: what a model needs, what a device can do, and the engine run on a cost model.

Nothing here loads a weight; a folder with a ``config.json`` is enough.
"""
