"""The hardware of this machine, measured. Read in this order:

machine      Hardware from what ranks measure together, and the cache of it
ops          the clock: products, attention, copies, elementwise and small ops
links        messages between ranks by their size
"""
