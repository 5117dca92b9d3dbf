"""An engine in another process, over HTTP; see `engine`."""
