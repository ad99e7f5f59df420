"""Models as firms write them: heads in several units, recommenders, forecasters, sound."""
