"""A campaign: seeded random trainings, faults, resumptions, hostile bytes and soaks, for as long as there is time.

    make campaign CAMPAIGN_ARGS="--minutes 10 --seed 7"

Tests hold what somebody thought of; a campaign draws what nobody did. It uses the public interface alone. Every case is
drawn from its name, KIND:SEED:NUMBER, and so can be shown again: `--case faults:7:123`.
"""
