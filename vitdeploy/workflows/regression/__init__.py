"""Two bundles or two reports, engine by engine: has the candidate lost answers or become slower?"""
