"""The back end of a build: from records of kernels (spec) to cubins and packs. It imports nothing that makes such
records, and no program that runs kernels imports it."""
