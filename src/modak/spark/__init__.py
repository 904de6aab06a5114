"""The engine room: Java and jar discovery, the Py4J gateway, the Spark session and `distribute`.

`gateway.open_gateway` gives Iceberg's Java API without a SparkContext; `session.start` puts a SparkContext into the
same JVM. Nothing here imports pyspark before it is needed, so that a command without Spark stays fast.
"""
