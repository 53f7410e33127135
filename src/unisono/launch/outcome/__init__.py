"""How a job ends: failure (files that a rank writes), verdict (which failure was first, and its description), monitor
(the launcher's view of the running job). A rank writes with `failure`; `launcher` runs the `monitor`."""
