"""The end of old lake rows: how far the retention line may move, and the commit that moves it."""
