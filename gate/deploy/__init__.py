"""Deployment: from proven bytes to a name that a server or a browser loads, and back.

    store/<sha256>/…                 a model with its data files, or golden vectors; never changed
    releases/<name>/<n>-<digest>/    manifest.json, and a link into the store for each slot
    live/<name>                      a link to the release that serves

All slots of a release move together, because the link is replaced by one rename. Whatever dies in
between, `live/<name>` points at a whole release, and deploying again finishes the job.
"""
