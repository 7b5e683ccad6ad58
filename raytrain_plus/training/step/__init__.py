"""Steps as transactions: the loop, one step or a window of overlapping ones, and what builds them."""
