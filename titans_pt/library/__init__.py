"""The package as a library: layers by keywords, and trained models. Its names are exported by titans_pt itself."""
