"""`instep dashboard`: a live local page of run folders, over the data of `instep.runs`.

- `guard`: checks who may see the page: the token, the Host and the Origin of every request and websocket. It does not
  depend on the page's content.
- `server`: binds the address, prints it, and serves until Ctrl-C.
- `source`: the data that all open pages share: the runs, and the readers of their curves.
- `page`, `details`, `chart`: the page, made with NiceGUI.

Text in a run folder is not trusted. The page shows it as text only: never as HTML, inside NiceGUI's strings of props,
or as a key in a chart's options. What a browser sends never becomes part of a path.
"""

__all__: list[str] = []  # this package is internal, and may change in any release
