"""How fast quire should be on a Mac, beside mlx-lm's server: `python -m tests.metal.prediction`.

``assumptions`` has what is assumed and where it comes from, ``engines`` what the two do in a step,
``model`` the arithmetic, ``sheet`` the tables of METAL.md. No Mac was asked.
"""
