"""`python -m jaxflash.bench`: speed and memory of attention on this machine, beside its rivals.

A problem (`problems`) is solved by contenders (`contenders`), whose programs (`programs`) are
checked, timed (`timing`) and weighed (`measure`, `memory`). Results are JSON (`results`), of which
tables (`report`) and pictures (`plots`) are made.
"""
