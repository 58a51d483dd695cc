"""`instep dashboard`: a live local page of run folders, over the data of `instep.runs`.

- `guard`: who may ask: the token, the Host and the Origin of every request and websocket. Knows nothing of the page.
- `server`: binds the address, says where the page is, and serves until Ctrl-C.
- `source`: what all open pages share: the runs, and the readers of their curves.
- `page`, `details`, `chart`: the page, on NiceGUI, which is loaded only here.

Text of a run folder is a stranger's. It reaches the page as text alone: never as HTML, as a prop written in a string,
or as the key of a chart's option. No path is made of what a browser sends.
"""

__all__: list[str] = []  # internal: may change in any release
