"""The engine between ops and backends: which kernel runs, on which operand form, with which scratch
memory.
"""
