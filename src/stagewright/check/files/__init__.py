"""Chakra traces that exist, whoever wrote them: reading, checking, adding up. Imports go downwards:

scan < reader < rules < check < kin: bytes to columns, messages to blocks, one file, many alike;
graph < exchange < world < meet < hang < search: one rank's dependencies, all ranks together.
"""
