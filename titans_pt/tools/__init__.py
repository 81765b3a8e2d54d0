"""Small tools that every room may borrow: whole files, records, statistics, figures. They import nothing else of ours
but the error class, and no torch, so that the many processes of ``titans prepare`` can use them."""
