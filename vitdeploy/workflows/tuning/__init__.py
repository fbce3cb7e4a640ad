"""`vitdeploy tune`: of all ways to make one model fast here, the one to ship."""
