"""The documentation site: pages that mkdocs needs besides docs/, generated from the code (`make
docs`)."""
