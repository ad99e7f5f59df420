"""Models as companies write them: heads in several units, recommenders, forecasters, sound."""
