"""`mpshard bench`: how fast the machine multiplies, how fast units travel, and how fast a whole step is.

Each benchmark runs on all ranks at once, returns plain numbers (a JSON object), and `tables` draws them.
"""
