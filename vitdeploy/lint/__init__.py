"""The static linter for TensorRT: what its parser and builder would refuse, slow down or leave unfused, by documented
facts. Changes with TensorRT's releases; rules stand in the file of their topic."""
