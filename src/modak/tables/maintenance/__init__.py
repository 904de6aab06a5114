"""Lake maintenance: delete debt, bin-pack, manifests, expiry, orphans; health, requests and erasure."""
