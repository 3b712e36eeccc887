"""``quire plan``: the capacity planner's text and pictures for people.

The figures come from ``engine.planning``, which knows neither words nor colours.
"""
