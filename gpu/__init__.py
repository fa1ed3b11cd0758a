"""What both sides use on a GPU: matrix products by measured algorithms. Imports torch; knows nothing of either side."""
