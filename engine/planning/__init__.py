"""Capacity on paper: a model's memory, a device's speed, and the engine run on a cost model.

Nothing here loads a weight; a folder with a ``config.json`` is enough.
"""
