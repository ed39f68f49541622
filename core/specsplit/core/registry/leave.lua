-- Removes all that a replica published.
-- KEYS: members, replica, blocks    ARGV: name, incarnation
-- Answers OK, WRONG_INCARNATION or UNKNOWN.
local _, refusal = fence(KEYS[2], ARGV[2])
if refusal then
  return refusal
end
redis.call('UNLINK', KEYS[2], KEYS[3])
redis.call('SREM', KEYS[1], ARGV[1])
return 'OK'
