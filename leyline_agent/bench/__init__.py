"""Measuring what history edits cost on a real server: one replay engine behind `leyline demo` and `leyline bench`.

A recorded history is walked turn by turn (`script`), each turn is sent and timed (`conversation`) the way an arm says
(`arms`), many sessions at once (`run`); `stats`, `tables`, `plots` and `results` make something to read of it.
"""
