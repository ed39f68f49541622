-- How many leading blocks of a prompt each replica holds.
-- KEYS: members    ARGV: prefix, hashes
-- Answers one text: for each replica its incarnation and the number of leading blocks, separated by spaces.
-- A member that no replica wrote (another type, no incarnation) is passed over, not an error for all.
-- Sets are closed under prefixes, so the length is found by halving. Asking one hash at a time is faster than
-- several with SMISMEMBER, whose arguments and answers cost more than the calls saved.
local call, sub, hashes = redis.pcall, string.sub, ARGV[2]
local num_hashes = #hashes / 16
local answer = {}
for _, member in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local incarnation = call('HGET', ARGV[1] .. 'r:' .. member, 'incarnation')
  if type(incarnation) == 'string' and #incarnation == 32 and not string.find(incarnation, '%X') then
    local key = ARGV[1] .. 'b:' .. member .. ':' .. incarnation
    local present, absent = 0, num_hashes + 1
    if num_hashes > 0 and call('SISMEMBER', key, sub(hashes, 1, 16)) == 0 then
      absent = 1 -- the most frequent answer
    end
    while absent - present > 1 do
      local middle = math.floor((present + absent) / 2)
      if call('SISMEMBER', key, sub(hashes, middle * 16 - 15, middle * 16)) == 1 then
        present = middle
      else
        absent = middle
      end
    end
    answer[#answer + 1] = incarnation
    answer[#answer + 1] = present
  end
end
return table.concat(answer, ' ')
