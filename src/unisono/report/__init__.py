"""`unisono report`: one HTML file about a run, and a trace for timeline viewers.

    command          the command line
    run_record       reads the run folder that train/telemetry wrote
    page             fills page.html: facts, charts, tables
    charts           SVG charts and the mesh; run_timeline: pipeline timelines and the trace
    program_listing  ops and communication of one step

Called by the command line only.
"""
