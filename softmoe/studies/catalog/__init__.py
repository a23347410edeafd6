"""One file a study: its docstring holds the question, the paper's finding and where; then

cells(lab)            the runs, as cells of a grid
claims(table)         what the paper found, as differences of our runs that are above zero where it holds
figure(table, lab)    the paper's figure from our numbers, the paper's own beside them
"""
