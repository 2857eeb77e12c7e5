"""The interface of a store for offloaded data, and the stores in host memory and on disk."""
