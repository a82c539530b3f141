"""The code that nodes and server share for secure aggregation, a protocol in which the server
learns only a sum mod 2^32.

This is the protocol of Bonawitz et al. (2017) against a malicious server, with keys signed by
enrolled services. In cohorts of more than 200 nodes a node may share secrets only with its
neighbours on a ring, as in Bell et al. (2020). `fedlgm_nodes.service.secagg` has the five steps of
a node, and `fedlgm_nodes.server.secagg` has those of the server. The page
`docs/how-to/secure-aggregation.md` describes the protocol.
"""
