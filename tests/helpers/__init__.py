"""Problems, runs and commands that several tests share; spawned processes import them too."""
