"""Each file is a study. Its docstring holds the question and what the paper found where; its functions are

    cells(lab)            the runs, as cells of a grid
    claims(table)         what the paper found, as differences of our runs that are above zero where it holds
    figure(table, lab)    the paper's figure from our numbers, the paper's own beside them

and where it is needed

    measure(row)          more numbers of a run, from its folder
    rows(lab)             rows of the table that a formula gives
    notes(table)          more for the verdict's page
"""
