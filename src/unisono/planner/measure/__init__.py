"""The hardware of this machine, measured. Read in this order:

machine      what ranks measure together, op by op and link by link
ops, attention, links   the parts of it
figures      Hardware from such figures
overheads    what the host does around ops, parameters, messages and steps
calibration  ops in a step against ops by themselves
zero_copies  copies into ZeRO's messages and out of them
brief        all of it in seconds, by ranks that are about to train
thorough     all of it in minutes, in processes of its own (`unisono bench hardware`)
"""
