"""A program, or a recorded step, as text, HTML page and SVG drawing.

listing        lines, parameters and collectives of one rank: what all renderers draw (communication)
text, html, svg   the renderers
dump           a program on disk after each pass
inside_ops     collectives inside an op
colours, sizes one colour a kind of collective; bytes in words
"""
