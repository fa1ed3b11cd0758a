"""What both sides use on a GPU: matrix products by measured algorithms, copies, marks of time.

Imports torch; knows nothing of either side.
"""
