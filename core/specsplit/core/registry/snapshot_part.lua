-- Collects a part of a snapshot beside the set in use. With many parts and slow answers that takes longer than
-- the time between two heartbeats, so each part is one.
-- KEYS: replica, collected    ARGV: incarnation, hashes, ttl ms
-- Answers OK, WRONG_INCARNATION or UNKNOWN.
local _, refusal = fence(KEYS[1], ARGV[1])
if refusal then
  return refusal
end
each('SADD', KEYS[2], ARGV[2])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 'OK'
