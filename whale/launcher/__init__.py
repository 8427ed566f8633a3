"""Starts the ranks of a run, shows what they print, and ends them together.

    whale run        options -> run.py: listens on TCP, starts mpirun (mpirun.py), and holds the run's loop (job/)
      mpirun         one worker per rank
        worker       connects to the launcher, forks the script (script.py), relays its output as frames (protocol.py)
          script     the user's program, as __main__

The worker is a process of its own because it must outlive the script to say how it ended, and must be able to end it
when the launcher is gone, whatever the script is doing. It forks before any library is loaded.
"""
