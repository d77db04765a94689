"""Compiled CPU loops: attention, bfloat16, AMX and AVX-512 instructions, OpenMP threads."""
