"""From the placement of one target to what its runtime loads, and the record of what really ran."""
