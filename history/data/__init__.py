"""The rank files of the token encoders, gzipped, so that counting needs no network.

`<encoding>.tiktoken.gz` unpacks to the file that tiktoken would download; `holdfast.history.tokens`
checks the sha256 of the contents before it uses them.
"""
